"""A model that says what it was told to, behind the OpenAI chat protocol: `adapter_model.py COMMAND…` prints its URL.

Each request is answered with a call of the tool `bash` with the next command, and the last with plain text.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted(BaseHTTPRequestHandler):
    commands: tuple[str, ...] = ()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        if turn < len(self.commands):
            function = {"name": "bash", "arguments": json.dumps({"command": self.commands[turn]})}
            calls = [{"id": f"call-{turn}", "type": "function", "function": function}]
            message, why = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
        else:
            message, why = {"role": "assistant", "content": "done"}, "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": why}
        answer = {"id": f"t-{turn}", "object": "chat.completion", "created": 0, "model": asked["model"]}
        body = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    Scripted.commands = tuple(sys.argv[1:])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
