"""Which requests are refused before their first token, and why."""

from __future__ import annotations

from belayer.engine.request import GenerationRequest


def problem(request: GenerationRequest, max_model_len: int, vocabulary: int) -> str | None:
    """Why an engine of `max_model_len` tokens and `vocabulary` cannot honour `request` exactly; None: it can."""
    sampling = request.sampling
    if not request.prompt_ids:
        return "the prompt is empty"
    if (reason := sampling.problem()) is not None:
        return reason
    known = len(request.resume_ids)
    if sampling.max_tokens < known:
        return f"max_tokens is {sampling.max_tokens} and {known} tokens are there already"
    if len(request.prompt_ids) + known >= max_model_len:
        length = len(request.prompt_ids) + known
        room = f"{length} prompt and resumed tokens leave no room in max_model_len {max_model_len}"
        return f"{room}: raise engine.max_model_len, or cut the context"
    if sampling.min_tokens and len({token for token in sampling.stop_token_ids if token < vocabulary}) == vocabulary:
        return "min_tokens holds every token back: all of the vocabulary is in stop_token_ids"
    ids = request.prompt_ids + request.resume_ids
    if min(ids) < 0 or max(ids) >= vocabulary:
        return f"token ids must be in [0, {vocabulary})"
    return None
