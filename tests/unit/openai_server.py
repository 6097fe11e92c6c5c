"""A server with the OpenAI API that knows no model: what clients are tried on. `openai_server.py --port N` runs it.

What it does is in the prompt: {"prompt": [n, ...]} is answered by outputs n0, n1, ... (an output may hold two tokens);
the prompt [13] is refused with HTTP 400, [14] breaks off in the middle, [15] is answered after two seconds, [17] never:
its connection is closed. To a body with "lines" the answer is these lines, as they stand.
"""

import json
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

METRICS = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="toy"} 7.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="toy"} 28.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="toy"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="77"} 1.0
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    asked: ClassVar[list] = []
    step = 0.002  # seconds between outputs
    lock = threading.Lock()

    def log_message(self, *words):
        pass

    def reply(self, text, status=200, kind="application/json"):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(json.dumps({"data": [{"id": "toy"}]}))
        if self.path == "/metrics":
            return self.reply(METRICS, kind="text/plain")
        self.reply("", 200 if self.path == "/health" else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.asked.append((time.monotonic(), body))
        if self.path == "/collective_rpc":
            return self.reply(json.dumps({"results": [self.called(body["method"])]}))
        prompt = body["prompt"]
        if prompt == [13]:
            return self.reply('{"error": "no luck"}', 400)
        if prompt == [17]:
            self.close_connection = True
            return None
        if not body.get("stream"):
            return self.reply(json.dumps({"choices": [{"text": "x"}]}))
        if prompt == [15]:
            time.sleep(2.0)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if "lines" in body:
            self.event("\n".join(body["lines"]).encode())
            return self.wfile.write(b"0\r\n\r\n")
        tokens = body["max_tokens"]
        for number in range(tokens // 2):  # two tokens an output
            time.sleep(self.step)
            self.chunk({"choices": [{"text": f"{prompt[0]}.{number} "}]})
            if prompt == [14]:
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
        self.chunk({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": len(prompt)}})
        self.event(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def called(self, method):
        """The answers of a drafting worker: two drafts for each request so far."""
        if method != "early_exit_counters":
            return None
        drafted = 2 * sum("prompt" in body for _, body in self.asked)
        return {"rounds": 1, "steps": 2, "drafted": drafted, "gate_ended": 0, "length_histogram": [0, 0, 1]}

    def chunk(self, document):
        self.event(b"data: " + json.dumps(document).encode() + b"\n\n")

    def event(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """A server on which many may knock at once."""

    daemon_threads = True
    request_queue_size = 128  # of five, which is Python's own, some of a burst are reset before they are heard


def serve(step=0.002, port=0):
    """A server in this process: (its address, what it was asked, a function that ends it)."""
    handler = type("Own", (Handler,), {"asked": [], "step": step})
    server = Server(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def end():
        server.shutdown()
        server.server_close()

    return f"http://127.0.0.1:{server.server_address[1]}", handler.asked, end


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("ValueError: no such option")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    serve(port=int(sys.argv[sys.argv.index("--port") + 1]))
    threading.Event().wait()
