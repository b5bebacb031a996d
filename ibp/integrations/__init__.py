"""Bridges to host frameworks: one file each, imported by name (`import ibp.integrations.<framework>`), never by `import
ibp`.

A file here adapts tables to what a framework calls (a feature store, an offloading hook, a cache) and needs that
framework installed; the package itself needs torch alone. docs/gnn.md, docs/llm.md and docs/kv-cache.md show them, and
tests skip without the framework. What is torch's own is in `ibp.nn` and `ibp.offload`.
"""
