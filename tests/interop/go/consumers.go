package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// filter has groups receive a part, chosen by tags and by SQL.
func filter(w *World) Facts {
	w.create(w.topic)
	sender := w.producer("")
	for number, tag := range []string{"TagA", "TagB", "TagC", "TagA", ""} {
		sent := message(w.topic, fmt.Sprint(number, tag))
		sent.WithProperty("n", fmt.Sprint(number))
		if tag != "" {
			sent.WithTag(tag)
		}
		if number > 2 {
			sent.WithProperty("city", "Zürich")
		}
		must(sender.SendSync(background(), sent))
	}
	selectors := map[string]consumer.MessageSelector{
		"all":  everything(),
		"tags": {Type: consumer.TAG, Expression: "TagA || TagC"},
		"sql":  {Type: consumer.SQL92, Expression: "n > 1 AND (city IS NULL OR TAGS = 'TagA')"},
	}
	counts := map[string]int{"all": 5, "tags": 3, "sql": 2}
	told := Facts{}
	seen := map[string]*Seen{}
	for name, selector := range selectors {
		seen[name], _ = w.consume("-"+name, selector, succeed)
	}
	for name := range selectors {
		w.wait(seen[name], counts[name])
		told[name] = sorted(seen[name].bodies())
	}
	return told
}

// consumeInOrder keeps the order of each key, past a message that makes its queue wait once.
func consumeInOrder(w *World) Facts {
	w.create(w.topic)
	sender := w.producer("", producer.WithQueueSelector(producer.NewHashQueueSelector()))
	for number := range 6 {
		for _, key := range []string{"apples", "pears", "plums"} {
			must(sender.SendSync(background(), message(w.topic, fmt.Sprint(key, number)).WithShardingKey(key)))
		}
	}
	var hesitated atomic.Bool
	hesitate := func(got *primitive.MessageExt) consumer.ConsumeResult {
		if string(got.Body) == "pears2" && hesitated.CompareAndSwap(false, true) {
			return consumer.SuspendCurrentQueueAMoment
		}
		return consumer.ConsumeSuccess
	}
	seen, _ := w.consume("", everything(), hesitate, consumer.WithConsumerOrder(true),
		consumer.WithSuspendCurrentQueueTimeMillis(200*time.Millisecond))
	w.wait(seen, 19)
	byKey := map[string][]string{}
	for _, body := range seen.bodies() {
		key := body[:len(body)-1]
		byKey[key] = append(byKey[key], body[len(body)-1:])
	}
	told := Facts{}
	for key, numbers := range byKey {
		told[key] = strings.Join(numbers, " ")
	}
	return told
}

// retryToDeadLetters refuses a message until it lies in the dead letters.
func retryToDeadLetters(w *World) Facts {
	w.create(w.topic)
	// A client that finds no topic for retries at its start looks again after 30 s, and takes its queues 20 s later.
	must0(w.admin.CreateTopic(background(), admin.WithTopicCreate("%RETRY%"+w.topic), admin.WithBrokerAddrCreate(w.broker),
		admin.WithReadQueueNums(1), admin.WithWriteQueueNums(1)))
	w.await("a route for retries", func() bool {
		found, err := w.admin.FetchPublishMessageQueues(background(), "%RETRY%"+w.topic)
		return err == nil && len(found) == 1
	})
	refuse := func(*primitive.MessageExt) consumer.ConsumeResult { return consumer.ConsumeRetryLater }
	seen, _ := w.consume("", everything(), refuse, consumer.WithMaxReconsumeTimes(1))
	must(w.producer("").SendSync(background(), message(w.topic, "poison").WithTag("TagA").WithKeys([]string{"k7"})))
	tries := []string{}
	for _, got := range w.wait(seen, 2) {
		tries = append(tries, fmt.Sprintf("retries %d of %s: %s", got.ReconsumeTimes, strings.ReplaceAll(got.Topic, w.topic, "TOPIC"), properties(got)))
	}
	letters := "%DLQ%" + w.topic
	w.await("dead letters", func() bool {
		found, err := w.admin.FetchPublishMessageQueues(background(), letters)
		return err == nil && len(found) > 0
	})
	dead := must(rocketmq.NewPullConsumer(consumer.WithNsResolver(w.resolver), consumer.WithGroupName(w.topic+"-dead"), consumer.WithInstance(w.topic+"-dead")))
	must0(dead.Subscribe(letters, everything()))
	must0(dead.Start())
	defer dead.Shutdown()
	queue := &primitive.MessageQueue{Topic: letters, BrokerName: w.brokerName()}
	var got []*primitive.MessageExt
	w.await("a dead letter", func() bool {
		result, err := dead.PullFrom(background(), queue, 0, 8)
		if err != nil || result.Status != primitive.PullFound {
			return false
		}
		got = result.GetMessageExts()
		return true
	})
	return Facts{"tries": tries, "dead": fmt.Sprintf("%d: %s, retries %d, %s", len(got), got[0].Body, got[0].ReconsumeTimes, properties(got[0]))}
}

// pull takes messages by hand, and keeps how far it came.
func pull(w *World) Facts {
	w.create(w.topic)
	sender := w.producer("", producer.WithQueueSelector(producer.NewManualQueueSelector()))
	queue := &primitive.MessageQueue{Topic: w.topic, BrokerName: w.brokerName(), QueueId: 1}
	send := func(number int) {
		sent := message(w.topic, fmt.Sprint("m", number)).WithTag(fmt.Sprint("Tag", number%2))
		sent.Queue = queue
		must(sender.SendSync(background(), sent))
	}
	for number := range 5 {
		send(number)
	}
	take := func(group, tags string) rocketmq.PullConsumer {
		made := must(rocketmq.NewPullConsumer(consumer.WithNsResolver(w.resolver), consumer.WithGroupName(w.topic+group), consumer.WithInstance(w.topic+group+fmt.Sprint(time.Now().UnixNano())), consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset)))
		must0(made.Subscribe(w.topic, consumer.MessageSelector{Type: consumer.TAG, Expression: tags}))
		must0(made.Start())
		return made
	}
	told := Facts{}
	reader := take("", "*")
	w.await("the end of the queue", func() bool {
		result, err := reader.PullFrom(background(), queue, 0, 1)
		return err == nil && result.MaxOffset == 5
	})
	for name, place := range map[string][2]int{"all": {0, 32}, "two": {1, 2}, "beyond": {50, 32}} {
		told[name] = outcome(reader.PullFrom(background(), queue, int64(place[0]), place[1]))
	}
	come := make(chan string)
	go func() { come <- outcome(reader.PullFrom(background(), queue, 5, 32)) }()
	send(5)
	told["held"] = <-come
	// Before its first rebalance it keeps nothing; then what is noted of its queues, and forgets what is of others.
	other := &primitive.MessageQueue{Topic: w.topic, BrokerName: queue.BrokerName, QueueId: queues}
	w.await("offset that is kept", func() bool {
		must0(reader.UpdateOffset(queue, 3))
		must0(reader.UpdateOffset(other, 7))
		must0(reader.PersistOffset(background(), w.topic))
		return must(reader.CurrentOffset(other)) != 7 && must(reader.CurrentOffset(queue)) == 3
	})
	must0(reader.Shutdown())
	some := take("-some", "Tag1")
	told["filtered"] = outcome(some.PullFrom(background(), queue, 0, 32))
	must0(some.Shutdown())
	return told
}

func outcome(result *primitive.PullResult, err error) string {
	if err != nil {
		return err.Error()
	}
	bodies := []string{}
	for _, got := range result.GetMessageExts() {
		bodies = append(bodies, string(got.Body))
	}
	return fmt.Sprintf("status %d, next %d, min %d, max %d, suggested %d: %s", result.Status, result.NextBeginOffset, result.MinOffset, result.MaxOffset, result.SuggestWhichBrokerId, strings.Join(bodies, " "))
}

// broadcast gives both members of a group everything.
func broadcast(w *World) Facts {
	w.create(w.topic)
	members := map[string]*Seen{}
	for _, name := range []string{"one", "other"} {
		members[name], _ = w.consume("", everything(), succeed, consumer.WithConsumerModel(consumer.BroadCasting), consumer.WithInstance(w.topic+name))
	}
	sender := w.producer("")
	for number := range 6 {
		must(sender.SendSync(background(), message(w.topic, fmt.Sprint("m", number))))
	}
	told := Facts{}
	for name, seen := range members {
		w.wait(seen, 6)
		told[name] = strings.Join(sorted(seen.bodies()), " ")
	}
	return told
}

// again is a later run: groups go on where they were.
func again(w *World) Facts {
	sender := w.producer("")
	for number := range 4 {
		sent := message(prefix()+"-filters", fmt.Sprint("again", number))
		must(sender.SendSync(background(), sent))
	}
	w.topic = prefix() + "-filters"
	pushed, _ := w.consume("-all", everything(), succeed)
	fresh := []string{}
	w.await("four new messages", func() bool {
		fresh = slices.DeleteFunc(pushed.bodies(), func(body string) bool { return !strings.HasPrefix(body, "again") })
		return len(fresh) >= 4
	})
	w.topic = prefix() + "-pulled"
	puller := must(rocketmq.NewPullConsumer(consumer.WithNsResolver(w.resolver), consumer.WithGroupName(w.topic)))
	must0(puller.Subscribe(w.topic, everything()))
	must0(puller.Start())
	defer puller.Shutdown()
	polled := []string{}
	for len(polled) < 3 {
		request, err := puller.Poll(background(), patient)
		must0(err)
		for _, got := range request.GetMsgList() {
			polled = append(polled, string(got.Body))
		}
		puller.ACK(background(), request, consumer.ConsumeSuccess)
	}
	return Facts{
		"pushed": strings.Join(sorted(fresh), " "), "polled": strings.Join(polled, " "),
		"goes on": len(pushed.bodies()) < 4+5, // the last of each queue may come twice: at least once
	}
}

// stay consumes the topic PREFIX until its standard input ends; bodies are lines of its output.
func stay(w *World) Facts {
	w.topic = prefix()
	tell := func(got *primitive.MessageExt) consumer.ConsumeResult {
		fmt.Println(string(got.Body))
		return consumer.ConsumeSuccess
	}
	seen, _ := w.consume("", everything(), tell)
	io.Copy(io.Discard, os.Stdin)
	return Facts{"bodies": seen.bodies()}
}
