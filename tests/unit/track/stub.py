"""A W&B server on the loopback interface: enough for the real SDK, and it can refuse to answer."""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FILE_STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")
OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")


class Server(ThreadingHTTPServer):
    """Keeps rows per run at the offsets the client sends, and a list of everything it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        self.operations: list[str] = []
        """GraphQL operations, in order."""
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.exit_codes: dict[str, int] = {}
        self.answers = threading.Event()
        """Cleared: requests are accepted and never answered."""
        self.answers.set()
        self.refuses_rows = False
        """Set: uploads of rows are answered with 404."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients reset connections when they leave; that is no news."""

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.operations.append(operation)
        if operation == "Viewer":
            user = {"id": "U", "entity": "me", "username": "me", "flags": "{}"}
            return {"viewer": {**user, "teams": {"edges": []}}}
        if operation == "UpsertBucket":
            name = variables["name"]
            known = {key: value for key, value in variables.items() if value is not None}
            self.runs.setdefault(name, {}).update(known)
            bucket = {"id": name, "name": name, "displayName": name, "historyLineCount": 0}
            bucket["project"] = self.project(variables)
            return {"upsertBucket": {"inserted": True, "bucket": bucket}}
        if operation == "RunResumeStatus":
            return {"model": {**self.project(variables), "bucket": self.bucket(variables["name"])}}
        if operation == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/upload/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        return {}

    def project(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("project")
        return {"id": "P", "name": name, "entity": {"id": "E", "name": "me"}}

    def bucket(self, run_id: str) -> dict[str, Any] | None:
        """What a client that resumes wants to know of a run."""
        if run_id not in self.runs:
            return None
        rows = self.rows.get(run_id, [])
        counts = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
        tails = {
            "historyTail": json.dumps([json.dumps(rows[-1])] if rows else []),
            "eventsTail": "[]",
        }
        state = {"summaryMetrics": "{}", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}'}
        return {"id": run_id, "name": run_id, **counts, **tails, **state}

    def file_stream(self, run_id: str, message: dict[str, Any]) -> None:
        for name, chunk in (message.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                rows = [json.loads(line) for line in chunk["content"]]
                self.rows.setdefault(run_id, [])[chunk["offset"] :] = rows
        if message.get("complete"):
            self.exit_codes[run_id] = message["exitcode"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.answer(lambda body: {})

    do_PUT = do_GET

    def do_POST(self) -> None:
        self.answer(self.post)

    def answer(self, make: Any) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append(self.path)
        self.server.answers.wait()
        refused = self.server.refuses_rows and FILE_STREAM.match(self.path)
        data = b"{}" if refused else json.dumps(make(body)).encode()
        self.send_response(404 if refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def post(self, body: bytes) -> dict[str, Any]:
        if match := FILE_STREAM.match(self.path):
            self.server.file_stream(match[1], json.loads(body))
            return {"exitcode": 0, "limits": {}}
        if self.path.startswith("/graphql"):
            message = json.loads(body)
            operation = OPERATION.search(message["query"])
            assert operation is not None
            data = self.server.graphql(operation[1], message.get("variables") or {})
            return {"data": data}
        return {}
