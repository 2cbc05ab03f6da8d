package main

import (
	"fmt"
	"strconv"
	"strings"
)

const CAPACITY = 3

type entry struct {
	key, value string
	end        int
}

type Service struct {
	now     int
	entries []entry
}

func NewService() *Service { return &Service{} }

func (s *Service) take(key string) *entry {
	for i, one := range s.entries {
		if one.key == key {
			s.entries = append(s.entries[:i:i], s.entries[i+1:]...)
			return &one
		}
	}
	return nil
}

func (s *Service) Answer(command []string) string {
	switch {
	case len(command) == 4 && command[0] == "put":
		ttl, _ := strconv.Atoi(command[3])
		evicted := ""
		if s.take(command[1]) == nil && len(s.entries) == CAPACITY {
			evicted = " evicted " + s.entries[0].key
			s.entries = s.entries[1:]
		}
		s.entries = append(s.entries, entry{command[1], command[2], s.now + ttl})
		return "ok" + evicted
	case len(command) == 2 && command[0] == "get":
		one := s.take(command[1])
		if one == nil {
			return "missing"
		}
		s.entries = append(s.entries, *one)
		return one.value
	case len(command) == 2 && command[0] == "tick":
		ticks, _ := strconv.Atoi(command[1])
		s.now += ticks
		var left []entry
		for _, one := range s.entries {
			if one.end > s.now {
				left = append(left, one)
			}
		}
		expired := len(s.entries) - len(left)
		s.entries = left
		return fmt.Sprintf("expired %d", expired)
	case len(command) == 1 && command[0] == "keys":
		var keys []string
		for _, one := range s.entries {
			keys = append(keys, one.key)
		}
		if len(keys) == 0 {
			return "empty"
		}
		return strings.Join(keys, " ")
	}
	return "error"
}
