OPEN = 8
CLOSE = 18
GAP = 15


class Service:
    def __init__(self) -> None:
        self.last = 0
        self.rooms: dict[int, str] = {}
        self.times: dict[int, tuple[int, int]] = {}

    def answer(self, command: list[str]) -> str:
        match command:
            case ["book", room, start, end]:
                error = self.refused(room, int(start), int(end))
                if error:
                    return error
                self.last += 1
                self.rooms[self.last], self.times[self.last] = room, (int(start), int(end))
                return f"ok {self.last}"
            case ["cancel", number]:
                if int(number) not in self.rooms:
                    return "error unknown"
                del self.rooms[int(number)], self.times[int(number)]
                return "ok"
            case ["move", number, start, end]:
                if int(number) not in self.rooms:
                    return "error unknown"
                error = self.refused(self.rooms[int(number)], int(start), int(end), int(number))
                if error:
                    return error
                self.times[int(number)] = (int(start), int(end))
                return "ok"
            case ["list", room]:
                found = sorted((*self.times[one], one) for one, name in self.rooms.items() if name == room)
                return " ".join(f"{one}:{start}-{end}" for start, end, one in found) or "none"
            case ["free", room, minutes]:
                taken = sorted(self.times[one] for one, name in self.rooms.items() if name == room)
                start = OPEN * 60
                for begin, end in taken:
                    if start + int(minutes) + GAP > begin:
                        start = end + GAP
                return str(start) if start + int(minutes) <= CLOSE * 60 else "none"
        return "error command"

    def refused(self, room: str, start: int, end: int, own: int = 0) -> str:
        if not OPEN * 60 <= start < end <= CLOSE * 60:
            return "error time"
        for number in sorted(self.rooms):
            begin, finish = self.times[number]
            if self.rooms[number] == room and number != own and start < finish + GAP and begin < end + GAP:
                return f"error taken {number}"
        return ""
