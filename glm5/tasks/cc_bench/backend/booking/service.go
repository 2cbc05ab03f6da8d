package main

import (
	"fmt"
	"sort"
	"strconv"
	"strings"
)

const OPEN = 8
const CLOSE = 18
const GAP = 15

type booking struct {
	number, start, end int
	room               string
}

type Service struct {
	last     int
	bookings []*booking
}

func NewService() *Service { return &Service{} }

func (s *Service) find(text string) (int, *booking) {
	number, _ := strconv.Atoi(text)
	for i, one := range s.bookings {
		if one.number == number {
			return i, one
		}
	}
	return -1, nil
}

func (s *Service) refused(room string, start, end, own int) string {
	if !(OPEN*60 <= start && start < end && end <= CLOSE*60) {
		return "error time"
	}
	for _, one := range s.bookings {
		if one.room == room && one.number != own && start < one.end+GAP && one.start < end+GAP {
			return fmt.Sprintf("error taken %d", one.number)
		}
	}
	return ""
}

func (s *Service) inRoom(room string) []*booking {
	var found []*booking
	for _, one := range s.bookings {
		if one.room == room {
			found = append(found, one)
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].start < found[j].start })
	return found
}

func (s *Service) Answer(command []string) string {
	name := ""
	if len(command) > 0 {
		name = command[0]
	}
	switch {
	case (name == "book" || name == "move") && len(command) == 4:
		start, _ := strconv.Atoi(command[2])
		end, _ := strconv.Atoi(command[3])
		if name == "move" {
			_, one := s.find(command[1])
			if one == nil {
				return "error unknown"
			}
			if message := s.refused(one.room, start, end, one.number); message != "" {
				return message
			}
			one.start, one.end = start, end
			return "ok"
		}
		if message := s.refused(command[1], start, end, 0); message != "" {
			return message
		}
		s.last++
		s.bookings = append(s.bookings, &booking{s.last, start, end, command[1]})
		return fmt.Sprintf("ok %d", s.last)
	case name == "cancel" && len(command) == 2:
		place, one := s.find(command[1])
		if one == nil {
			return "error unknown"
		}
		s.bookings = append(s.bookings[:place], s.bookings[place+1:]...)
		return "ok"
	case name == "list" && len(command) == 2:
		var texts []string
		for _, one := range s.inRoom(command[1]) {
			texts = append(texts, fmt.Sprintf("%d:%d-%d", one.number, one.start, one.end))
		}
		if len(texts) == 0 {
			return "none"
		}
		return strings.Join(texts, " ")
	case name == "free" && len(command) == 3:
		minutes, _ := strconv.Atoi(command[2])
		start := OPEN * 60
		for _, one := range s.inRoom(command[1]) {
			if start+minutes+GAP > one.start {
				start = one.end + GAP
			}
		}
		if start+minutes > CLOSE*60 {
			return "none"
		}
		return strconv.Itoa(start)
	}
	return "error command"
}
