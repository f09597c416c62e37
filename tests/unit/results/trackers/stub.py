"""A W&B server on the loopback interface: enough for the real SDK, and it can be made to fail."""

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving() -> "Iterator[Server]":
    """A server that answers until the end of the block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.answers.set()
            server.shutdown()
            thread.join()


FILE_STREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream")
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
        self.summaries: dict[str, dict[str, Any]] = {}
        self.exit_codes: dict[str, int] = {}
        self.projects = {"eke"}
        """Names of the projects that reports can be saved in."""
        self.views: dict[str, dict[str, Any]] = {}
        """Id of a saved report -> what was sent of it last."""
        self.answers = threading.Event()
        """Cleared: requests are accepted and never answered."""
        self.answers.set()
        self.refusals: dict[str, int] = {}
        """Part of a path, or a GraphQL operation -> status it is answered with."""
        self.delay_s = 0.0
        """Seconds before each answer."""
        self.swallows_rows = False
        """Set: uploads of rows are acknowledged and forgotten."""
        self.rows_until_silent: int | None = None
        """Once it has so many rows it accepts requests and never answers."""
        self.silent_about: str | None = None
        """Asked about this run it accepts requests and never answers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients reset connections when they leave; that is no news."""

    def refusal(self, path: str, operation: str) -> int | None:
        hits = (s for part, s in self.refusals.items() if part == operation or part in path)
        return next(hits, None)

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.operations.append(operation)
        if operation == "Viewer":
            user = {"id": "U", "entity": "me", "username": "me", "flags": "{}"}
            return {"viewer": {**user, "teams": {"edges": []}}}
        if operation == "GetDefaultEntity":
            return {"viewer": {"id": "U", "entity": "me"}}
        if operation == "UpsertBucket":
            name = variables["name"]
            known = {key: value for key, value in variables.items() if value is not None}
            self.runs.setdefault(name, {}).update(known)
            bucket = {"id": name, "name": name, "displayName": name, "historyLineCount": 0}
            bucket["project"] = self.project(variables)
            return {"upsertBucket": {"inserted": True, "bucket": bucket}}
        if operation == "RunResumeStatus":
            return {"model": {**self.project(variables), "bucket": self.bucket(variables["name"])}}
        if operation == "Run":  # what the public API asks for
            return {"project": {"run": self.public_run(variables["name"])}}
        if operation == "RunHistoryKeys":
            rows = self.rows.get(variables["name"])
            keys = {"lastStep": rows[-1]["_step"]} if rows else None
            return {"project": {"run": {"historyKeys": keys}}}
        if operation == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/upload/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        return self.report(operation, variables)

    def report(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What wandb-workspaces (0.4.13) asks when it saves a report."""
        if operation == "ProjectInternalId":
            is_known = variables["projectName"] in self.projects
            return {"project": {"id": "P", "internalId": "I"} if is_known else None}
        if operation == "GetProjects":
            pages = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
            edges = [{"node": _public_project(name)} for name in sorted(self.projects)]
            return {"models": {"pageInfo": pages, "edges": edges}}
        if operation == "SpecificReport":
            view = self.views.get(variables["reportId"])
            return {"view": view and {"id": variables["reportId"], "spec": view["spec"]}}
        if operation == "upsertView":
            view_id = variables["id"] or f"VmlldzoxM{len(self.views)}"
            self.views[view_id] = variables
            names = ("type", "name", "displayName", "description", "spec")
            project = {"id": "P", "name": variables["projectName"]}
            view = {"id": view_id, **{name: variables[name] for name in names}}
            view["project"] = {**project, "entityName": variables["entityName"]}
            view["updatedAt"] = "2026-01-01T00:00:00"
            return {"upsertView": {"inserted": not variables["id"], "view": view}}
        return {}

    def project(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("project")
        entity = variables.get("entity") or "me"
        return {"id": "P", "name": name, "entity": {"id": "E", "name": entity}}

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
        summary = json.dumps(self.summaries.get(run_id, {}))
        state = {"summaryMetrics": summary, "config": "{}", "tags": [], "wandbConfig": '{"t": 1}'}
        return {"id": run_id, "name": run_id, **counts, **tails, **state}

    def public_run(self, run_id: str) -> dict[str, Any] | None:
        """RunFragment of wandb/apis/public/runs.py (0.31)."""
        if run_id not in self.runs:
            return None
        known, code = self.runs[run_id], self.exit_codes.get(run_id)
        return {
            "id": run_id,
            "name": run_id,
            "projectId": "1",
            "displayName": known.get("displayName"),
            "state": "running" if code is None else "failed" if code else "finished",
            "config": known.get("config", "{}"),
            "summaryMetrics": json.dumps(self.summaries.get(run_id, {})),
            "systemMetrics": "{}",
            "historyLineCount": len(self.rows.get(run_id, [])),
            "historyKeys": None,
            "tags": known.get("tags", []),
            "group": known.get("groupName"),
            "user": {"name": "me", "username": "me"},
        }

    def file_stream(self, run_id: str, message: dict[str, Any]) -> None:
        for name, chunk in (message.get("files") or {}).items():
            if name == "wandb-history.jsonl" and not self.swallows_rows:
                rows = [json.loads(line) for line in chunk["content"]]
                self.rows.setdefault(run_id, [])[chunk["offset"] :] = rows
                limit = self.rows_until_silent
                if limit is not None and len(self.rows[run_id]) >= limit:
                    self.answers.clear()
            if name == "wandb-summary.json":
                self.summaries[run_id] = json.loads(chunk["content"][-1])
        if message.get("complete"):
            self.exit_codes[run_id] = message["exitcode"]


def _public_project(name: str) -> dict[str, Any]:
    """ProjectFragment of wandb/apis/public/projects.py (0.31)."""
    absent = ("email", "flags", "deletedAt", "apiKeys", "teams")
    user = {"id": "U", "name": "me", "username": "me", "admin": False, "entity": "me"}
    return {
        "__typename": "Project",
        "id": "P",
        "name": name,
        "entityName": "me",
        "createdAt": "2026-01-01T00:00:00",
        "isBenchmark": False,
        "user": {"__typename": "User", **user, **dict.fromkeys(absent)},
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.answer()

    do_PUT = do_POST = do_GET

    def answer(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        server.requests.append(self.path)
        if server.silent_about is not None and server.silent_about.encode() in body:
            server.answers.clear()
        server.answers.wait()
        time.sleep(server.delay_s)
        message = json.loads(body) if self.command == "POST" and body.startswith(b"{") else {}
        found = OPERATION.search(message.get("query", ""))
        operation = found[1] if found else ""
        status = server.refusal(self.path, operation)
        answer = {} if status else self.reply(operation, message)
        server.answers.wait()  # it may have fallen silent over this very request
        data = json.dumps(answer).encode()
        self.send_response(status or 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def reply(self, operation: str, message: dict[str, Any]) -> dict[str, Any]:
        if match := FILE_STREAM.match(self.path):
            self.server.file_stream(match[3], message)
            return {"exitcode": 0, "limits": {}}
        if operation:
            return {"data": self.server.graphql(operation, message.get("variables") or {})}
        return {}
