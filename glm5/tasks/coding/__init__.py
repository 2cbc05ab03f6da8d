"""Programs that hidden tests decide: writing a function, repairing one (§3.2, §3.3)."""
