"""What commands and the library do with data besides training: build a corpus, describe a source,
and load batches for a user's own script."""
