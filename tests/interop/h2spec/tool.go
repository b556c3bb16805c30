//go:build tool

// Package tool names the program that go.sum pins.
package tool

import _ "github.com/summerwind/h2spec/cmd/h2spec"
