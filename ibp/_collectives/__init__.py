"""Collectives whose tensors travel coded: see `ibp.distributed`."""
