package main

import (
	"fmt"
	"strconv"
)

const FEE = 150
const OVERDRAFT = 2000

type booking struct {
	giver, taker string
	amount, fee  int
}

type Service struct {
	balances map[string]int
	fees     int
	done     []booking
}

func NewService() *Service { return &Service{balances: map[string]int{}} }

func (s *Service) apply(one booking, sign int) {
	if one.giver != "" {
		s.balances[one.giver] -= sign * (one.amount + one.fee)
	}
	s.balances[one.taker] += sign * one.amount
	s.fees += sign * one.fee
}

func (s *Service) known(names ...string) bool {
	for _, name := range names {
		if _, there := s.balances[name]; !there {
			return false
		}
	}
	return true
}

func (s *Service) Answer(command []string) string {
	name := ""
	if len(command) > 0 {
		name = command[0]
	}
	switch {
	case name == "open" && len(command) == 2:
		if s.known(command[1]) {
			return "error exists"
		}
		s.balances[command[1]] = 0
		return "ok"
	case name == "deposit" && len(command) == 3, name == "transfer" && len(command) == 4:
		names := command[1 : len(command)-1]
		amount, _ := strconv.Atoi(command[len(command)-1])
		if amount <= 0 {
			return "error amount"
		}
		if !s.known(names...) {
			return "error unknown"
		}
		if name == "deposit" {
			s.done = append(s.done, booking{"", names[0], amount, 0})
			s.apply(s.done[len(s.done)-1], 1)
			return fmt.Sprintf("ok %d", s.balances[names[0]])
		}
		if names[0] == names[1] {
			return "error same"
		}
		fee := (amount*FEE + 9999) / 10000
		if s.balances[names[0]]-amount-fee < -OVERDRAFT {
			return "error funds"
		}
		s.done = append(s.done, booking{names[0], names[1], amount, fee})
		s.apply(s.done[len(s.done)-1], 1)
		return fmt.Sprintf("ok %d", fee)
	case name == "balance" && len(command) == 2:
		if !s.known(command[1]) {
			return "error unknown"
		}
		return strconv.Itoa(s.balances[command[1]])
	case name == "undo" && len(command) == 1:
		if len(s.done) == 0 {
			return "error nothing"
		}
		s.apply(s.done[len(s.done)-1], -1)
		s.done = s.done[:len(s.done)-1]
		return "ok"
	case name == "total" && len(command) == 1:
		sum := 0
		for _, balance := range s.balances {
			sum += balance
		}
		return fmt.Sprintf("%d %d", sum, s.fees)
	}
	return "error command"
}
