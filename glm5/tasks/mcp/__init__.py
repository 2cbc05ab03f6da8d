"""Tasks whose tools are MCP servers in rooms without a network: MCP-Atlas, Tool-Decathlon (§6.1)."""
