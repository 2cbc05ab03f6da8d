"""A server made with the package `mcp` itself."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0


@server.tool()
def add(number: int) -> str:
    """Add to the counter."""
    global count
    count += number
    return f"the counter is at {count}"


if __name__ == "__main__":
    server.run("stdio")
