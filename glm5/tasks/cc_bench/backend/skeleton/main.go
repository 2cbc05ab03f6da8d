package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

func main() {
	service := NewService()
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Println(service.Answer(strings.Fields(lines.Text())))
	}
}
