mod service;

use std::io::BufRead;

fn main() {
    let mut service = service::Service::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let command: Vec<&str> = line.split_whitespace().collect();
        println!("{}", service.answer(&command));
    }
}
