"""Coded tokens of a KV-cache, as `ibp.integrations.transformers` keeps them; nothing here knows a framework.

`coding`: keys or values of a layer as coded rows. `arena`: the memory that these are in. `history`: all coded tokens of
a layer. `lane`: how they come to the device that computes.
"""
