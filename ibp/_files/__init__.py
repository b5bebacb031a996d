"""Files of tables: safetensors files whose tensors are the parts of tables, and everything else that such a file
holds (FORMAT.md section 9). `reader.py` and `opened.py` read them; `writer.py` and `saving.py` write them."""
