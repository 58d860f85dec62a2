"""Text and tokens: the chat template, the transcript of a conversation, incremental decoding."""
