"""Agent-as-a-Judge for frontend projects (§6.2, App. B.4): a browser, the judge, and a scripted judge."""
