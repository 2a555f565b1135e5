"""The wire forms that clients speak. A dialect turns a body into asks, and completions into answers."""

from belayer.gateway.dialects.base import Ask, Delta, Order, Served, View, Writer
from belayer.gateway.dialects.chat import chat_order
from belayer.gateway.dialects.completions import completions_order
from belayer.gateway.dialects.sglang import sglang_order
from belayer.gateway.dialects.vllm import vllm_order

__all__ = [
    "Ask",
    "Delta",
    "Order",
    "Served",
    "View",
    "Writer",
    "chat_order",
    "completions_order",
    "sglang_order",
    "vllm_order",
]
