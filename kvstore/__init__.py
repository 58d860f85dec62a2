"""The store: KV cache blocks of agents on disk, content-addressed, with one manifest for each state of an agent.

Begin with `store.py`: open a store, hold an agent, begin a transaction. `reader.py` is all that only reads. Below them:

- `disk`: the one module that changes the file system, locks, canonical JSON;
- `format`: what each file holds, byte by byte, and the tables of object kinds, layer kinds, codecs and references;
- `commit`: how a state gets to disk: staging, transaction, refs, journal, index.

Above them:

- `graph`: the one walk over states and the one list of roots;
- `history`: from a REF to a state, logs, differences;
- `lifecycle.py`: snapshot, restore and fork;
- `gc`, `remove`, `archive`, `verify`: collect, erase, move and check.

Nothing here knows MLX, the environment or a terminal.
"""
