const OPEN = 8;
const CLOSE = 18;
const GAP = 15;

type Booking = { number: number; room: string; start: number; end: number };

export class Service {
  private last = 0;
  private bookings: Booking[] = [];

  private refused(room: string, start: number, end: number, own = 0): string {
    if (!(OPEN * 60 <= start && start < end && end <= CLOSE * 60)) return "error time";
    const near = this.bookings.find(
      (one) => one.room === room && one.number !== own && start < one.end + GAP && one.start < end + GAP,
    );
    return near === undefined ? "" : `error taken ${near.number}`;
  }

  private inRoom(room: string): Booking[] {
    return this.bookings.filter((one) => one.room === room).sort((a, b) => a.start - b.start);
  }

  answer(command: string[]): string {
    const [name, first, second, third] = command;
    const found = this.bookings.find((one) => one.number === Number(first));
    switch (`${name} ${command.length}`) {
      case "book 4": {
        const error = this.refused(first, Number(second), Number(third));
        if (error !== "") return error;
        this.last += 1;
        this.bookings.push({ number: this.last, room: first, start: Number(second), end: Number(third) });
        return `ok ${this.last}`;
      }
      case "cancel 2":
        if (found === undefined) return "error unknown";
        this.bookings = this.bookings.filter((one) => one !== found);
        return "ok";
      case "move 4": {
        if (found === undefined) return "error unknown";
        const error = this.refused(found.room, Number(second), Number(third), found.number);
        if (error !== "") return error;
        found.start = Number(second);
        found.end = Number(third);
        return "ok";
      }
      case "list 2":
        return this.inRoom(first).map((one) => `${one.number}:${one.start}-${one.end}`).join(" ") || "none";
      case "free 3": {
        let start = OPEN * 60;
        for (const one of this.inRoom(first)) if (start + Number(second) + GAP > one.start) start = one.end + GAP;
        return start + Number(second) <= CLOSE * 60 ? String(start) : "none";
      }
    }
    return "error command";
  }
}
