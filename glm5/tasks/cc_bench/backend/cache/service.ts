const CAPACITY = 3;

export class Service {
  private now = 0;
  private entries = new Map<string, { value: string; end: number }>();

  answer(command: string[]): string {
    const [name, key, value, ttl] = command;
    if (name === "put" && command.length === 4) {
      let evicted = "";
      if (!this.entries.delete(key) && this.entries.size === CAPACITY) {
        const oldest = Array.from(this.entries.keys())[0];
        this.entries.delete(oldest);
        evicted = ` evicted ${oldest}`;
      }
      this.entries.set(key, { value, end: this.now + Number(ttl) });
      return `ok${evicted}`;
    }
    if (name === "get" && command.length === 2) {
      const found = this.entries.get(key);
      if (found === undefined) return "missing";
      this.entries.delete(key);
      this.entries.set(key, found);
      return found.value;
    }
    if (name === "tick" && command.length === 2) {
      this.now += Number(key);
      const expired = Array.from(this.entries).filter(([, one]) => one.end <= this.now);
      for (const [old] of expired) this.entries.delete(old);
      return `expired ${expired.length}`;
    }
    if (name === "keys" && command.length === 1) return Array.from(this.entries.keys()).join(" ") || "empty";
    return "error";
  }
}
