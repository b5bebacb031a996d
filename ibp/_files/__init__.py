"""Files of tables: safetensors files whose tensors are the parts of tables, and what they hold otherwise (FORMAT.md
section 9). `reader.py` and `opened.py` read them; `writer.py` and `saving.py` write them."""
