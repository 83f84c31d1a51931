"""From text to tokens on disk: the documents, the tokenizer, the shards that data.py reads."""
