"""KV-caches outside of the attention that uses them: pages for serving (`store`), rows by index (`rows`)."""
