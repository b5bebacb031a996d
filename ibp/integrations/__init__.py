"""Bridges to host frameworks: one file each, imported by name (`import ibp.integrations.<framework>`), never by `import
ibp`.

A file here adapts tables to what a framework calls (a feature store, an offloading hook, a cache) and needs that
framework installed; the package itself needs torch alone. Each has an example under examples/, a page under docs/ and
tests that skip without the framework. What is torch's own is in `ibp.nn`.
"""
