"""Sessions: requests bound to a journalled rollout, so that a retry is answered and a crash costs nothing."""

from belayer.gateway.sessions.book import Sessions
from belayer.gateway.sessions.session import Session, Turn

__all__ = ["Session", "Sessions", "Turn"]
