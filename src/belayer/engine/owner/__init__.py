"""The owner process, which holds weights and KV arena, and how driver and workers talk to it."""
