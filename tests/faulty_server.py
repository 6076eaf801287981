"""A real HTTP server on loopback that serves a directory and can do one fault per request."""

import contextlib
import http.server
import os
import re
import socket
import struct
import threading
import time


class FaultyServer:
    """`faults[file name]` is a list of faults, one used up by each request for that file; then all is well.

    A fault is (what, *arguments): ("status", 404), ("cut", n) closes after n bytes, ("reset", n) resets the
    connection after n, ("announce", n) says Content-Length n, ("no length",), ("silent", seconds) before the
    body, ("drip", seconds) after every 4 KB, ("redirect", path), ("page", content type, bytes),
    ("no ranges",), ("careless",) sends the range without looking at If-Range.
    `requests` lists what came: (file name, Range header or None).
    """

    def __init__(self, root):
        self.root, self.faults, self.requests, self.etags = str(root), {}, [], True

    def __enter__(self):
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(ConnectionError):
                    owner.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        name, asked = os.path.basename(request.path), request.headers.get("Range")
        self.requests.append((name, asked))
        what, *args = (self.faults.get(name) or [("well",)]).pop(0)
        path = self.root + request.path
        if what == "status" or not os.path.isfile(path):
            return request.send_error(args[0] if what == "status" else 404)
        if what == "redirect":
            request.send_response(302)
            request.send_header("Location", args[0])
            return request.end_headers()
        with open(path, "rb") as f:
            body = f.read()
        etag, kind = f'"{hash(body)}"', "application/octet-stream"
        if what == "page":
            kind, body = args
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and what != "no ranges" else 0
        if what != "careless" and request.headers.get("If-Range") != etag:
            start = 0
        if start and start >= len(body):
            return request.send_error(416)
        request.send_response(206 if start else 200)
        request.send_header("Content-Type", kind)
        if self.etags:
            request.send_header("ETag", etag)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if what != "no length":
            request.send_header("Content-Length", str(args[0] if what == "announce" else len(body) - start))
        request.end_headers()
        body = body[start:]
        if what in ("cut", "reset"):
            body = body[: args[0]]
        if what == "silent":
            time.sleep(args[0])
        for i in range(0, len(body), 4096):
            request.wfile.write(body[i : i + 4096])
            if what == "drip":
                time.sleep(args[0])
        if what == "reset":
            time.sleep(0.05)  # a reset would overtake what was sent
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
