"""Search tasks over a web of installed packages: builder, exact questions, tools, family (§4.2.3)."""
