"""Downloads from and uploads to the Hugging Face Hub: the only code that opens connections.

`fetch.py` is the way in for models, tokenizers, datasets and tasks; `repo.py` lists what is there,
`download.py` gets a file and verifies it, `snapshot.py` keeps files together; `push.py` uploads.
"""
