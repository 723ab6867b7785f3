package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// sample makes a message from its id alone, as the Java programs do, so that who reads it can tell
// whether it is whole.
func sample(topic, id string, number, bodyBytes int) *primitive.Message {
	message := primitive.NewMessage(topic, body(id, bodyBytes))
	if number%3 != 2 {
		message.WithTag([]string{"TagA", "TagB"}[number%3])
	}
	message.WithKeys([]string{id, "shared-" + strconv.Itoa(number%7)})
	message.Flag = int32(number)
	message.WithProperty("id", id)
	message.WithProperty("text", "caf\u00e9 \u4e2d\u6587 \U0001f600")
	return message
}

func isWhole(message *primitive.MessageExt) bool {
	id := message.GetProperty("id")
	return id != "" && string(message.Body) == string(body(id, len(message.Body)))
}

// body is text that is as long as asked, starts with the id and compresses like text.
func body(id string, sizeBytes int) []byte {
	var text strings.Builder
	text.WriteString(id)
	for i := 0; text.Len() < sizeBytes; i++ {
		fmt.Fprintf(&text, " %s:%d", id, i)
	}
	return []byte(text.String()[:max(sizeBytes, len(id))])
}
