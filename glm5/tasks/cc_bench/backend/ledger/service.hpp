#pragma once
#include <map>
#include <string>
#include <vector>

constexpr long FEE = 150;
constexpr long OVERDRAFT = 2000;

class Service {
    struct Booking {
        std::string giver, taker;
        long amount, fee;
    };
    std::map<std::string, long> balances;
    long fees = 0;
    std::vector<Booking> done;

    void apply(const Booking& one, long sign) {
        if (!one.giver.empty()) balances[one.giver] -= sign * (one.amount + one.fee);
        balances[one.taker] += sign * one.amount;
        fees += sign * one.fee;
    }
    void book(const Booking& one) {
        apply(one, 1);
        done.push_back(one);
    }

public:
    std::string answer(const std::vector<std::string>& command) {
        const std::string name = command.empty() ? "" : command[0];
        const auto words = command.size();
        if (name == "open" && words == 2) return balances.emplace(command[1], 0).second ? "ok" : "error exists";
        if ((name == "deposit" && words == 3) || (name == "transfer" && words == 4)) {
            const long amount = std::stol(command.back());
            if (amount <= 0) return "error amount";
            for (std::size_t i = 1; i + 1 < words; i++)
                if (!balances.count(command[i])) return "error unknown";
            if (name == "deposit") {
                book({"", command[1], amount, 0});
                return "ok " + std::to_string(balances[command[1]]);
            }
            if (command[1] == command[2]) return "error same";
            const long fee = (amount * FEE + 9999) / 10000;
            if (balances[command[1]] - amount - fee < -OVERDRAFT) return "error funds";
            book({command[1], command[2], amount, fee});
            return "ok " + std::to_string(fee);
        }
        if (name == "balance" && words == 2) {
            const auto found = balances.find(command[1]);
            return found == balances.end() ? "error unknown" : std::to_string(found->second);
        }
        if (name == "undo" && words == 1) {
            if (done.empty()) return "error nothing";
            apply(done.back(), -1);
            done.pop_back();
            return "ok";
        }
        if (name == "total" && words == 1) {
            long sum = 0;
            for (const auto& one : balances) sum += one.second;
            return std::to_string(sum) + " " + std::to_string(fees);
        }
        return "error command";
    }
};
