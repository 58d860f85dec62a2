#!/usr/bin/env bash
# lifecycle.sh [DIR]: three agents from their first text to their last byte. It leaves all its files in DIR.
set -euo pipefail
dir=${1:-$(mktemp -d)}
model=${AMEM_MODEL:-gemma-3-270m}
unset AMEM_MODEL # an agent remembers its model
export AMEM_STORE=$dir/store AMEM_QUIET=1
field() { jq -r "select(.type == \"result\") | $1"; }

for n in $(seq 24); do
  echo "Rule $n: berth $n takes one boat of up to $((n + 5)) metres, for $((3 * n)) crowns a day."
done > "$dir/handbook.txt"
for agent in clerk pilot diver; do
  echo "You are the $agent of the harbour." > "$dir/$agent.txt"
  amem prefill "$agent" "$dir/handbook.txt" "$dir/$agent.txt" --model "$model" --domain harbour --json |
    field '"\(.agent): \(.tokens) tokens, \(.reused) of them reused"'
done

echo "News: berth 7 is closed for repairs." > "$dir/news.txt"
for agent in clerk pilot diver; do
  amem extend "$agent" "$dir/news.txt" --phase news --json |
    field '"\(.agent): \(.prefilled) tokens prefilled, \(.bytes_written) bytes written"'
done

amem snapshot clerk morning --note "before the first boat"
amem fork clerk@morning apprentice

amem chat clerk "A boat of 30 metres asks for a berth." --max-tokens 12 --seed 1 > "$dir/clerk.answer"
amem chat apprentice "A boat of 9 metres asks for a berth." --max-tokens 12 --seed 1 > "$dir/apprentice.answer"
amem diff clerk apprentice
amem diff clerk apprentice --json |
  field '"\(.common_tokens) tokens and \(.shared_blocks) blocks in common, parted in turn \(.a.turn.index)"'

after=$(amem inspect clerk --json | field .state)
amem restore clerk@morning --expect "$after" --json | field '"to go forward again: \(.undo)"'
amem log clerk --json | jq -r 'select(.type == "commit") | "\(.op) \(.tokens)"'

amem export clerk --lineage -o "$dir/clerk.amem"
amem --store "$dir/second" import "$dir/clerk.amem" harbourmaster
amem --store "$dir/second" chat harbourmaster "Is berth 7 open?" --max-tokens 12 --seed 1 --json |
  field '"\(.agent): \(.reused) tokens reused, \(.prefilled) prefilled"'

amem rm apprentice
amem gc --keep-history 0 --json | field '"\(.freed_objects) files, \(.freed_bytes) bytes freed"'

for store in "$dir/store" "$dir/second"; do
  amem --store "$store" verify --deep --json | field '"\(.checked) files, \(.findings) findings"'
done
