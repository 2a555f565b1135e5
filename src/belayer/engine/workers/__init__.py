"""The processes that make tokens: how they are started, watched, spoken to and fenced."""
