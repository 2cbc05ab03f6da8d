#pragma once
#include <algorithm>
#include <list>
#include <string>
#include <vector>

constexpr int CAPACITY = 3;

class Service {
    struct Entry {
        std::string key, value;
        long end;
    };
    long now = 0;
    std::list<Entry> entries;

    std::list<Entry>::iterator find(const std::string& key) {
        return std::find_if(entries.begin(), entries.end(), [&](const Entry& one) { return one.key == key; });
    }

public:
    std::string answer(const std::vector<std::string>& command) {
        const std::string name = command.empty() ? "" : command[0];
        if (name == "put" && command.size() == 4) {
            std::string evicted;
            auto found = find(command[1]);
            if (found != entries.end()) {
                entries.erase(found);
            } else if (entries.size() == CAPACITY) {
                evicted = " evicted " + entries.front().key;
                entries.pop_front();
            }
            entries.push_back({command[1], command[2], now + std::stol(command[3])});
            return "ok" + evicted;
        }
        if (name == "get" && command.size() == 2) {
            auto found = find(command[1]);
            if (found == entries.end()) return "missing";
            entries.splice(entries.end(), entries, found);
            return entries.back().value;
        }
        if (name == "tick" && command.size() == 2) {
            now += std::stol(command[1]);
            const auto before = entries.size();
            entries.remove_if([&](const Entry& one) { return one.end <= now; });
            return "expired " + std::to_string(before - entries.size());
        }
        if (name == "keys" && command.size() == 1) {
            std::string keys;
            for (const Entry& one : entries) keys += (keys.empty() ? "" : " ") + one.key;
            return keys.empty() ? "empty" : keys;
        }
        return "error";
    }
};
