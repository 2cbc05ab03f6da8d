use std::collections::BTreeMap;

const OPEN: i32 = 8;
const CLOSE: i32 = 18;
const GAP: i32 = 15;

struct Booking {
    room: String,
    start: i32,
    end: i32,
}

pub struct Service {
    last: i32,
    bookings: BTreeMap<i32, Booking>,
}

impl Service {
    pub fn new() -> Service {
        Service { last: 0, bookings: BTreeMap::new() }
    }

    fn check(&self, room: &str, start: i32, end: i32, own: i32) -> Result<(), String> {
        if !(OPEN * 60 <= start && start < end && end <= CLOSE * 60) {
            return Err("time".to_string());
        }
        for (number, one) in &self.bookings {
            if one.room == room && *number != own && start < one.end + GAP && one.start < end + GAP {
                return Err(format!("taken {}", number));
            }
        }
        Ok(())
    }

    fn in_room(&self, room: &str) -> Vec<(i32, i32, i32)> {
        let mine = self.bookings.iter().filter(|(_, one)| one.room == room);
        let mut found: Vec<_> = mine.map(|(number, one)| (one.start, one.end, *number)).collect();
        found.sort();
        found
    }

    fn text(&mut self, command: &[&str]) -> Result<String, String> {
        match command {
            ["book", room, start, end] => {
                let (start, end) = (start.parse().unwrap(), end.parse().unwrap());
                self.check(room, start, end, 0)?;
                self.last += 1;
                self.bookings.insert(self.last, Booking { room: room.to_string(), start, end });
                Ok(format!("ok {}", self.last))
            }
            ["cancel", number] => {
                let gone = self.bookings.remove(&number.parse().unwrap());
                gone.map(|_| "ok".to_string()).ok_or("unknown".to_string())
            }
            ["move", number, start, end] => {
                let number: i32 = number.parse().unwrap();
                let (start, end) = (start.parse().unwrap(), end.parse().unwrap());
                let room = self.bookings.get(&number).ok_or("unknown".to_string())?.room.clone();
                self.check(&room, start, end, number)?;
                self.bookings.insert(number, Booking { room, start, end });
                Ok("ok".to_string())
            }
            ["list", room] => {
                let found = self.in_room(room);
                let texts: Vec<String> = found.iter().map(|(start, end, n)| format!("{}:{}-{}", n, start, end)).collect();
                Ok(if texts.is_empty() { "none".to_string() } else { texts.join(" ") })
            }
            ["free", room, minutes] => {
                let minutes: i32 = minutes.parse().unwrap();
                let mut start = OPEN * 60;
                for (begin, end, _) in self.in_room(room) {
                    if start + minutes + GAP > begin {
                        start = end + GAP;
                    }
                }
                Ok(if start + minutes <= CLOSE * 60 { start.to_string() } else { "none".to_string() })
            }
            _ => Err("command".to_string()),
        }
    }

    pub fn answer(&mut self, command: &[&str]) -> String {
        self.text(command).unwrap_or_else(|error| format!("error {}", error))
    }
}
