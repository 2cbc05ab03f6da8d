#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "service.hpp"

int main() {
    Service service;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        std::vector<std::string> command{std::istream_iterator<std::string>(words), {}};
        std::cout << service.answer(command) << "\n";
    }
}
