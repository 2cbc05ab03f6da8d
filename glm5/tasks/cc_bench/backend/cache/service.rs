const CAPACITY: usize = 3;

struct Entry {
    key: String,
    value: String,
    end: i64,
}

pub struct Service {
    now: i64,
    entries: Vec<Entry>,
}

impl Service {
    pub fn new() -> Service {
        Service { now: 0, entries: Vec::new() }
    }

    fn find(&self, key: &str) -> Option<usize> {
        self.entries.iter().position(|one| one.key == key)
    }

    pub fn answer(&mut self, command: &[&str]) -> String {
        match command {
            ["put", key, value, ttl] => {
                let mut evicted = String::new();
                if let Some(place) = self.find(key) {
                    self.entries.remove(place);
                } else if self.entries.len() == CAPACITY {
                    evicted = format!(" evicted {}", self.entries.remove(0).key);
                }
                let end = self.now + ttl.parse::<i64>().unwrap();
                self.entries.push(Entry { key: key.to_string(), value: value.to_string(), end });
                format!("ok{}", evicted)
            }
            ["get", key] => match self.find(key) {
                None => "missing".to_string(),
                Some(place) => {
                    let one = self.entries.remove(place);
                    let value = one.value.clone();
                    self.entries.push(one);
                    value
                }
            },
            ["tick", ticks] => {
                self.now += ticks.parse::<i64>().unwrap();
                let (before, now) = (self.entries.len(), self.now);
                self.entries.retain(|one| one.end > now);
                format!("expired {}", before - self.entries.len())
            }
            ["keys"] if self.entries.is_empty() => "empty".to_string(),
            ["keys"] => self.entries.iter().map(|one| one.key.as_str()).collect::<Vec<_>>().join(" "),
            _ => "error".to_string(),
        }
    }
}
