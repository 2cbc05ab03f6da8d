#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>

constexpr int OPEN = 8;
constexpr int CLOSE = 18;
constexpr int GAP = 15;

class Service {
    struct Booking {
        std::string room;
        int start, end;
    };
    int last = 0;
    std::map<int, Booking> bookings;

    std::string refused(const std::string& room, int start, int end, int own = 0) const {
        if (!(OPEN * 60 <= start && start < end && end <= CLOSE * 60)) return "error time";
        for (const auto& [number, one] : bookings)
            if (one.room == room && number != own && start < one.end + GAP && one.start < end + GAP)
                return "error taken " + std::to_string(number);
        return "";
    }

    std::vector<std::pair<int, int>> in_room(const std::string& room) const {
        std::vector<std::pair<int, int>> found;
        for (const auto& [number, one] : bookings)
            if (one.room == room) found.emplace_back(one.start, number);
        std::sort(found.begin(), found.end());
        return found;
    }

public:
    std::string answer(const std::vector<std::string>& command) {
        const std::string name = command.empty() ? "" : command[0];
        const auto words = command.size();
        if (name == "book" && words == 4) {
            const int start = std::stoi(command[2]), end = std::stoi(command[3]);
            const std::string error = refused(command[1], start, end);
            if (!error.empty()) return error;
            bookings[++last] = {command[1], start, end};
            return "ok " + std::to_string(last);
        }
        if (name == "cancel" && words == 2) return bookings.erase(std::stoi(command[1])) ? "ok" : "error unknown";
        if (name == "move" && words == 4) {
            const auto found = bookings.find(std::stoi(command[1]));
            if (found == bookings.end()) return "error unknown";
            const int start = std::stoi(command[2]), end = std::stoi(command[3]);
            const std::string error = refused(found->second.room, start, end, found->first);
            if (!error.empty()) return error;
            found->second.start = start;
            found->second.end = end;
            return "ok";
        }
        if (name == "list" && words == 2) {
            std::string text;
            for (const auto& [start, number] : in_room(command[1]))
                text += (text.empty() ? "" : " ") + std::to_string(number) + ":" + std::to_string(start) + "-" +
                        std::to_string(bookings[number].end);
            return text.empty() ? "none" : text;
        }
        if (name == "free" && words == 3) {
            const int minutes = std::stoi(command[2]);
            int start = OPEN * 60;
            for (const auto& [begin, number] : in_room(command[1]))
                if (start + minutes + GAP > begin) start = bookings[number].end + GAP;
            return start + minutes <= CLOSE * 60 ? std::to_string(start) : "none";
        }
        return "error command";
    }
};
