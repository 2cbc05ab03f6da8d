FEE = 150
OVERDRAFT = 2000


class Service:
    def __init__(self) -> None:
        self.balances: dict[str, int] = {}
        self.fees = 0
        self.done: list[tuple[str, str, int, int]] = []

    def answer(self, command: list[str]) -> str:
        match command:
            case ["open", name]:
                if name in self.balances:
                    return "error exists"
                self.balances[name] = 0
                return "ok"
            case ["deposit", name, text]:
                return self.deposit(name, int(text))
            case ["transfer", giver, taker, text]:
                return self.transfer(giver, taker, int(text))
            case ["balance", name]:
                return str(self.balances.get(name, "error unknown"))
            case ["undo"]:
                return self.undo()
            case ["total"]:
                return f"{sum(self.balances.values())} {self.fees}"
        return "error command"

    def deposit(self, name: str, amount: int) -> str:
        if amount <= 0:
            return "error amount"
        if name not in self.balances:
            return "error unknown"
        self.book("", name, amount, 0)
        return f"ok {self.balances[name]}"

    def transfer(self, giver: str, taker: str, amount: int) -> str:
        if amount <= 0:
            return "error amount"
        if giver not in self.balances or taker not in self.balances:
            return "error unknown"
        if giver == taker:
            return "error same"
        fee = (amount * FEE + 9999) // 10_000
        if self.balances[giver] - amount - fee < -OVERDRAFT:
            return "error funds"
        self.book(giver, taker, amount, fee)
        return f"ok {fee}"

    def book(self, giver: str, taker: str, amount: int, fee: int) -> None:
        if giver:
            self.balances[giver] -= amount + fee
        self.balances[taker] += amount
        self.fees += fee
        self.done.append((giver, taker, amount, fee))

    def undo(self) -> str:
        if not self.done:
            return "error nothing"
        giver, taker, amount, fee = self.done.pop()
        if giver:
            self.balances[giver] += amount + fee
        self.balances[taker] -= amount
        self.fees -= fee
        return "ok"
