"""vLLM as a backend: its EngineCore, scheduler and model inside our worker process."""

import sys

# vLLM imports audio and video decoders for models that want them. Ours see token ids only, and a torchcodec built for
# another torch ends the import with an OSError that vLLM does not expect.
sys.modules.setdefault("torchcodec", None)  # pyright: ignore[reportArgumentType]
