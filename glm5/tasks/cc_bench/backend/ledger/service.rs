use std::collections::HashMap;

const FEE: i64 = 150;
const OVERDRAFT: i64 = 2000;

struct Booking {
    giver: Option<String>,
    taker: String,
    amount: i64,
    fee: i64,
}

pub struct Service {
    balances: HashMap<String, i64>,
    fees: i64,
    done: Vec<Booking>,
}

impl Service {
    pub fn new() -> Service {
        Service { balances: HashMap::new(), fees: 0, done: Vec::new() }
    }

    fn apply(&mut self, one: &Booking, sign: i64) {
        if let Some(giver) = &one.giver {
            *self.balances.get_mut(giver).unwrap() -= sign * (one.amount + one.fee);
        }
        *self.balances.get_mut(&one.taker).unwrap() += sign * one.amount;
        self.fees += sign * one.fee;
    }

    fn book(&mut self, one: Booking) {
        self.apply(&one, 1);
        self.done.push(one);
    }

    fn text(&mut self, command: &[&str]) -> Result<String, &'static str> {
        match command {
            ["open", name] => {
                if self.balances.contains_key(*name) {
                    return Err("exists");
                }
                self.balances.insert(name.to_string(), 0);
                Ok("ok".to_string())
            }
            ["deposit", name, text] => {
                let amount: i64 = text.parse().unwrap();
                if amount <= 0 {
                    return Err("amount");
                }
                if !self.balances.contains_key(*name) {
                    return Err("unknown");
                }
                self.book(Booking { giver: None, taker: name.to_string(), amount, fee: 0 });
                Ok(format!("ok {}", self.balances[*name]))
            }
            ["transfer", giver, taker, text] => {
                let amount: i64 = text.parse().unwrap();
                if amount <= 0 {
                    return Err("amount");
                }
                if !self.balances.contains_key(*giver) || !self.balances.contains_key(*taker) {
                    return Err("unknown");
                }
                if giver == taker {
                    return Err("same");
                }
                let fee = (amount * FEE + 9999) / 10000;
                if self.balances[*giver] - amount - fee < -OVERDRAFT {
                    return Err("funds");
                }
                self.book(Booking { giver: Some(giver.to_string()), taker: taker.to_string(), amount, fee });
                Ok(format!("ok {}", fee))
            }
            ["balance", name] => self.balances.get(*name).map(|balance| balance.to_string()).ok_or("unknown"),
            ["undo"] => {
                let one = self.done.pop().ok_or("nothing")?;
                self.apply(&one, -1);
                Ok("ok".to_string())
            }
            ["total"] => Ok(format!("{} {}", self.balances.values().sum::<i64>(), self.fees)),
            _ => Err("command"),
        }
    }

    pub fn answer(&mut self, command: &[&str]) -> String {
        self.text(command).unwrap_or_else(|error| format!("error {}", error))
    }
}
