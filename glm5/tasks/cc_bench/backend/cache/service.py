CAPACITY = 3


class Service:
    def __init__(self) -> None:
        self.now = 0
        self.entries: dict[str, tuple[str, int]] = {}

    def answer(self, command: list[str]) -> str:
        match command:
            case ["put", key, value, ttl]:
                evicted = ""
                if key in self.entries:
                    del self.entries[key]
                elif len(self.entries) == CAPACITY:
                    oldest = next(iter(self.entries))
                    del self.entries[oldest]
                    evicted = f" evicted {oldest}"
                self.entries[key] = (value, self.now + int(ttl))
                return f"ok{evicted}"
            case ["get", key]:
                if key not in self.entries:
                    return "missing"
                self.entries[key] = self.entries.pop(key)
                return self.entries[key][0]
            case ["tick", ticks]:
                self.now += int(ticks)
                expired = [key for key, (_, end) in self.entries.items() if end <= self.now]
                for key in expired:
                    del self.entries[key]
                return f"expired {len(expired)}"
            case ["keys"]:
                return " ".join(self.entries) or "empty"
        return "error"
