"""transformers' continuous batching as a backend: its cache, scheduler and model inside our worker process."""
