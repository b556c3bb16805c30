package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// administer makes a topic, finds it in the list and its queues in the route, and deletes it again.
func administer(w *World) Facts {
	w.create(w.topic)
	found := []string{}
	for _, queue := range must(w.admin.FetchPublishMessageQueues(background(), w.topic)) {
		found = append(found, fmt.Sprint(queue.QueueId))
	}
	created := w.listed(w.topic)
	groups := must(w.admin.GetAllSubscriptionGroup(background(), w.broker, patient))
	must0(w.admin.DeleteTopic(background(), admin.WithTopicDelete(w.topic), admin.WithBrokerAddrDelete(w.broker)))
	return Facts{
		"listed": created, "queues": found, "listed after deletion": w.listed(w.topic),
		"tools group": groups.SubscriptionGroupTable["TOOLS_CONSUMER"],
	}
}

// listed tells whether the name server knows a topic.
func (w *World) listed(topic string) bool {
	return slices.Contains(must(w.admin.FetchAllTopicList(background())).TopicList, topic)
}

// sendEveryWay sends alone, with an answer to wait for, to be told of and not at all, and in a batch.
func sendEveryWay(w *World) Facts {
	w.create(w.topic)
	sender := w.producer("", producer.WithQueueSelector(producer.NewManualQueueSelector()), producer.WithCompressMsgBodyOverHowmuch(4096))
	queue := &primitive.MessageQueue{Topic: w.topic, BrokerName: w.brokerName(), QueueId: 2}
	to := func(body string) *primitive.Message {
		made := message(w.topic, body)
		made.Queue = queue
		return made
	}
	results := []*primitive.SendResult{}
	rich := to("rich").WithTag("TagA").WithKeys([]string{"k1", "k2"})
	rich.WithProperty("city", "東京")
	large := to("large " + strings.Repeat("0123456789", 2000))
	for _, sent := range []*primitive.Message{to("plain"), rich, large} {
		results = append(results, must(sender.SendSync(background(), sent)))
	}
	var answered sync.WaitGroup
	answered.Add(1)
	must0(sender.SendAsync(background(), func(_ context.Context, result *primitive.SendResult, err error) {
		defer answered.Done()
		must0(err)
		results = append(results, result)
	}, to("async")))
	answered.Wait()
	must0(sender.SendOneWay(background(), to("one-way")))
	batch := []*primitive.Message{to("batch 0"), to("batch 1"), to("batch 2")}
	batched := must(sender.SendSync(background(), batch...))

	seen, _ := w.consume("", everything(), succeed)
	told := map[string]string{}
	for _, got := range w.wait(seen, 8) {
		body, _, _ := strings.Cut(string(got.Body), " 0")
		told[body] = fmt.Sprintf("queue %d, %d bytes, flag %d, retries %d, %s", got.Queue.QueueId, len(got.Body), got.SysFlag, got.ReconsumeTimes, properties(got))
	}
	answers := []string{}
	for _, result := range results {
		answers = append(answers, describe(result))
	}
	return Facts{
		"answers": answers, "received": told, "batch status": batched.Status,
		"batch offset ids": len(strings.Split(batched.OffsetMsgID, ",")),
		"region":           results[0].RegionID, "is traced": results[0].TraceOn,
		"tags": rich.GetTags(), "ids agree": agree(seen.all(), results),
	}
}

func describe(result *primitive.SendResult) string {
	return fmt.Sprintf("status %d, queue %d, offset %d", result.Status, result.MessageQueue.QueueId, result.QueueOffset)
}

// agree tells whether each answer's two ids are those of a message that came.
func agree(seen []*primitive.MessageExt, results []*primitive.SendResult) bool {
	known := map[string]string{}
	for _, message := range seen {
		known[message.MsgId] = message.OffsetMsgId
	}
	for _, result := range results {
		if known[result.MsgID] != result.OffsetMsgID {
			return false
		}
	}
	return true
}

func (w *World) brokerName() string {
	return must(w.admin.FetchPublishMessageQueues(background(), w.topic))[0].BrokerName
}

// delay has a message come after the first level's second.
func delay(w *World) Facts {
	w.create(w.topic)
	seen, _ := w.consume("", everything(), succeed)
	result := must(w.producer("").SendSync(background(), message(w.topic, "later").WithDelayTimeLevel(1)))
	got := w.wait(seen, 1)[0]
	waited := got.StoreTimestamp - got.BornTimestamp
	return Facts{
		"status": result.Status, "bodies": seen.bodies(), "properties": properties(got),
		"waited long enough": waited >= 950, "retries": got.ReconsumeTimes,
	}
}

// Decisions of a transaction: by body, what is said at once and what when the broker asks.
var decisions = map[string][2]primitive.LocalTransactionState{
	"commit":          {primitive.CommitMessageState, primitive.CommitMessageState},
	"roll back":       {primitive.RollbackMessageState, primitive.RollbackMessageState},
	"commit if asked": {primitive.UnknowState, primitive.CommitMessageState},
	"roll back if so": {primitive.UnknowState, primitive.RollbackMessageState},
}

type decider struct {
	sync.Mutex
	asked map[string]string
}

func (d *decider) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	return decisions[string(message.Body)][0]
}

func (d *decider) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	d.Lock()
	defer d.Unlock()
	d.asked[string(message.Body)] = properties(message)
	return decisions[string(message.Body)][1]
}

// transact commits and rolls back, at once and when the broker asks.
func transact(w *World) Facts {
	w.create(w.topic)
	seen, _ := w.consume("", everything(), succeed)
	asked := &decider{asked: map[string]string{}}
	sender := must(rocketmq.NewTransactionProducer(asked,
		producer.WithNsResolver(w.resolver), producer.WithGroupName(w.topic+"-sender"),
		producer.WithInstanceName(w.topic+"-sender"), producer.WithSendMsgTimeout(patient)))
	must0(sender.Start())
	w.closing = append(w.closing, func() { sender.Shutdown() })
	states := map[string]string{}
	for body := range decisions {
		result := must(sender.SendMessageInTransaction(background(), message(w.topic, body)))
		states[body] = fmt.Sprintf("status %d, state %d, id %t", result.Status, result.State, result.TransactionID != "")
	}
	w.await("what was committed", func() bool { // twice where an answer came after the next question
		bodies := seen.bodies()
		return slices.Contains(bodies, "commit") && slices.Contains(bodies, "commit if asked")
	})
	questions := map[string]string{}
	w.await("questions", func() bool {
		asked.Lock()
		defer asked.Unlock()
		for _, body := range []string{"commit if asked", "roll back if so"} {
			questions[body] = asked.asked[body]
		}
		return questions["commit if asked"] != "" && questions["roll back if so"] != ""
	})
	told := map[string]string{}
	for _, got := range seen.all() {
		told[string(got.Body)] = fmt.Sprintf("flag %d, %s", got.SysFlag, properties(got))
	}
	return Facts{"sent": states, "received": told, "asked": questions}
}

// request asks and is answered by another client of the topic.
func request(w *World) Facts {
	w.create(w.topic)
	answering := w.producer("-answering")
	answer := func(asked *primitive.MessageExt) consumer.ConsumeResult {
		reply := must(consumer.CreateReplyMessage(asked, nil))
		reply.Body = []byte("re: " + string(asked.Body)) // what 2.1.2 takes as the body becomes properties
		must(answering.SendSync(background(), reply))
		return consumer.ConsumeSuccess
	}
	// The client tells of a producer with its next heartbeat, here the one of the consumer that shares its instance.
	asking := w.producer("-asking", producer.WithInstanceName(w.topic))
	seen, _ := w.consume("", everything(), answer)
	reply := must(asking.Request(background(), patient, message(w.topic, "how much")))
	names := []string{}
	for name := range reply.GetProperties() {
		names = append(names, name)
	}
	return Facts{"reply": string(reply.Body), "asked": properties(seen.all()[0]), "reply properties": strings.Join(sorted(names), " ")}
}

// trace has producer and consumer tell what they did to a topic for traces.
func trace(w *World) Facts {
	w.create(w.topic)
	traces := w.topic + "-traces"
	w.create(traces)
	told := &primitive.TraceConfig{TraceTopic: traces, Access: primitive.Local, Resolver: w.resolver, GroupName: w.topic}
	must(w.producer("", producer.WithTrace(told)).SendSync(background(), message(w.topic, "traced").WithKeys([]string{"k9"})))
	seen, _ := w.consume("", everything(), succeed, consumer.WithTrace(told))
	w.wait(seen, 1)
	reader := &World{resolver: w.resolver, topic: traces}
	defer reader.close()
	records, _ := reader.consume("-reader", everything(), succeed)
	kinds := map[string]bool{}
	w.await("three traces", func() bool {
		for _, body := range records.bodies() {
			for _, line := range strings.Split(body, "\x02") {
				kind, _, _ := strings.Cut(line, "\x01")
				kinds[kind] = kind != ""
			}
		}
		return kinds["Pub"] && kinds["SubBefore"] && kinds["SubAfter"]
	})
	return Facts{"kinds": []string{"Pub", "SubAfter", "SubBefore"}}
}

// refuse tells how the broker refuses what cannot be.
func refuse(w *World) Facts {
	w.create(w.topic)
	readonly := w.topic + "-readonly"
	must0(w.admin.CreateTopic(background(), admin.WithTopicCreate(readonly), admin.WithBrokerAddrCreate(w.broker), admin.WithPerm(4)))
	w.await("a route of "+readonly, func() bool { return w.listed(readonly) })
	sender := w.producer("", producer.WithRetry(0), producer.WithCompressMsgBodyOverHowmuch(64<<20),
		producer.WithQueueSelector(producer.NewManualQueueSelector()))
	told := Facts{}
	for name, sent := range map[string]*primitive.Message{
		"too large":     message(w.topic, strings.Repeat("x", 5<<20)),
		"illegal name":  message("not a topic!", "x"),
		"read-only":     message(readonly, "x"),
		"no such queue": message(w.topic, "x"),
		"delay level":   message(w.topic, "x").WithDelayTimeLevel(99),
		"system topic":  message("RMQ_SYS_TRANS_HALF_TOPIC", "x"),
	} {
		sent.Queue = &primitive.MessageQueue{Topic: sent.Topic, BrokerName: w.brokerName()}
		if name == "no such queue" {
			sent.Queue.QueueId = 77
		}
		result, err := sender.SendSync(background(), sent)
		if err != nil {
			reason, _, _ := strings.Cut(err.Error(), " Producer: ") // the client's port follows
			told[name] = strings.ReplaceAll(reason, w.topic, "TOPIC")
		} else {
			told[name] = fmt.Sprint("status ", result.Status)
		}
	}
	return told
}
