"""A small MCP server without any package: files of its working folder, and tools that go wrong."""

import json
import os
import socket
import sys
import time

TEXT = {"type": "string"}
TOOLS = {
    "list_files": {},
    "read_file": {"path": TEXT},
    "write_file": {"path": TEXT, "text": TEXT},
    "fetch": {"host": TEXT},
    "crash": {},
    "sleep": {"seconds": {"type": "number"}},
}


def run(name, given):
    if name == "list_files":
        return "\n".join(sorted(os.listdir(".")))
    if name == "read_file":
        with open(given["path"]) as file:
            return file.read()
    if name == "write_file":
        with open(given["path"], "w") as file:
            file.write(given["text"])
        return f"wrote {len(given['text'])} characters"
    if name == "fetch":
        socket.create_connection((given["host"], 80), 2)
    if name == "sleep":
        time.sleep(given["seconds"])
    if name == "crash":
        os._exit(1)
    return ""


def answer(method, given):
    if method == "initialize":
        info = {"name": "shelf", "version": "1"}
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":  # two pages
        names = list(TOOLS)
        page = names[3:] if given.get("cursor") else names[:3]
        tools = [
            {
                "name": name,
                "description": f"{name} of the shelf",
                "inputSchema": {"type": "object", "properties": TOOLS[name], "required": list(TOOLS[name])},
            }
            for name in page
        ]
        return {"tools": tools} | ({} if given.get("cursor") else {"nextCursor": "more"})
    if method == "tools/call":
        try:
            return {"content": [{"type": "text", "text": run(given["name"], given.get("arguments") or {})}]}
        except Exception as error:
            return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    print("this line is a log, not a message")
    result = answer(message["method"], message.get("params") or {})
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
