"""The formats that training itself reads and writes: our own, Hugging Face's and PEFT's, as lists
of tensors that are loaded when needed (`checkpoint.py`, `lazy.py`). Those of other trainers are in
`overland/apps/convert/formats`, which also lists all of them."""
