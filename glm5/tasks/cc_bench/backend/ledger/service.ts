const FEE = 150;
const OVERDRAFT = 2000;

type Booking = { giver: string; taker: string; amount: number; fee: number };

export class Service {
  private balances = new Map<string, number>();
  private fees = 0;
  private done: Booking[] = [];

  private add(name: string, amount: number): void {
    this.balances.set(name, (this.balances.get(name) ?? 0) + amount);
  }

  private apply(one: Booking, sign: number): void {
    if (one.giver !== "") this.add(one.giver, -sign * (one.amount + one.fee));
    this.add(one.taker, sign * one.amount);
    this.fees += sign * one.fee;
  }

  private book(one: Booking): void {
    this.apply(one, 1);
    this.done.push(one);
  }

  answer(command: string[]): string {
    const [name, first, second] = command;
    switch (`${name} ${command.length}`) {
      case "open 2":
        if (this.balances.has(first)) return "error exists";
        this.balances.set(first, 0);
        return "ok";
      case "deposit 3": {
        const amount = Number(second);
        if (amount <= 0) return "error amount";
        if (!this.balances.has(first)) return "error unknown";
        this.book({ giver: "", taker: first, amount, fee: 0 });
        return `ok ${this.balances.get(first)}`;
      }
      case "transfer 4": {
        const amount = Number(command[3]);
        if (amount <= 0) return "error amount";
        if (!this.balances.has(first) || !this.balances.has(second)) return "error unknown";
        if (first === second) return "error same";
        const fee = Math.floor((amount * FEE + 9999) / 10000);
        if ((this.balances.get(first) ?? 0) - amount - fee < -OVERDRAFT) return "error funds";
        this.book({ giver: first, taker: second, amount, fee });
        return `ok ${fee}`;
      }
      case "balance 2":
        return String(this.balances.get(first) ?? "error unknown");
      case "undo 1": {
        const last = this.done.pop();
        if (last === undefined) return "error nothing";
        this.apply(last, -1);
        return "ok";
      }
      case "total 1":
        return `${Array.from(this.balances.values()).reduce((sum, one) => sum + one, 0)} ${this.fees}`;
    }
    return "error command";
  }
}
