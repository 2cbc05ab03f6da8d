"""Presentation slides: briefs, a compact markup or HTML, a renderer, and a reward that resists tricks (§4.2.5)."""
