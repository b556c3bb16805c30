'use strict';
// What the Node client ali-ons does against one name server, and what came of it, as JSON:
//
//     node client.js NAME_SERVER BROKER PREFIX SCENARIO...
//
// Topics and groups are called PREFIX-SCENARIO; topics exist before, as this client creates none.
const { Consumer, Message, Producer } = require('ali-ons');
const RemotingClient = require('ali-ons/lib/remoting_client');

const [ nameServer, , prefix, ...wanted ] = process.argv.slice(2);
const PATIENT_MS = 150000;
const silent = { debug() {}, info() {}, warn() {}, error() {} };
const common = {
  nameSrv: [ nameServer ], httpclient: {}, logger: silent, clientIP: '127.0.0.1', connectTimeout: PATIENT_MS,
  rebalanceInterval: 300, pollNameServerInteval: 1000,
};
const consumers = [];
const problems = [];

// Where version 3.12.0 gives a request 3 s, an answer that is late has all others of its connection lost, a message sent
// twice, or a consumer that was starting never listen.
const { invoke } = RemotingClient.prototype;
RemotingClient.prototype.invoke = function(address, command) {
  return invoke.call(this, address, command, PATIENT_MS);
};

async function waitFor(what, condition) {
  const deadline = Date.now() + PATIENT_MS;
  while (!await condition()) {
    if (Date.now() > deadline) throw new Error(`no ${what} within ${PATIENT_MS} ms: ${[ ...new Set(problems) ].join('; ')}`);
    await new Promise(resolve => setTimeout(resolve, 20));
    // Version 3.12.0 may miss its own event for a message that it pulled while it started, and then leaves it lying.
    for (const consumer of consumers) {
      for (const topic of consumer.subscriptions.keys()) consumer.emit(`topic_${topic}_changed`);
    }
  }
}

// A consumer from the first message on, and the messages that it is given.
async function consume(topic, group, filter, options = {}, listen = async () => {}) {
  const consumer = new Consumer({
    ...common, consumerGroup: group, consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET', ...options,
  });
  consumers.push(consumer);
  // All groups of a program are rebalanced one after the other; one that the broker has not heard of yet, as its consumer
  // is just starting, fails that for all. Whoever waits for it in order to listen then never does.
  const { doRebalance } = consumer;
  consumer.doRebalance = () => doRebalance.call(consumer).catch(error => problems.push(error.message));
  consumer.on('error', error => problems.push(error.message));
  const seen = [];
  consumer.subscribe(topic, filter, async message => {
    seen.push({
      body: message.body.toString(), tags: message.tags, keys: message.keys, city: message.properties.city,
      retries: message.reconsumeTimes, id: message.msgId, properties: Object.keys(message.properties).sort().join(' ').trim(),
      waited: message.storeTimestamp - message.bornTimestamp,
    });
    return await listen(message);
  });
  await consumer.ready();
  return seen;
}

function message(topic, body, tags, more = {}) {
  return Object.assign(new Message(topic, tags, body), more);
}

// Where a consumer's queues are goes to the broker without an answer: ask until it is there.
async function persist(consumer) {
  await consumer.persistConsumerOffset();
  const { offsetTable: offsets } = consumer._offsetStore;
  if (consumer.options.isBroadcast) return; // in memory
  for (const { messageQueue } of consumer.processQueueTable.values()) {
    const offset = offsets.get(messageQueue.key);
    if (!(offset > 0)) continue;
    await waitFor('stored offset', async () => {
      return await consumer._offsetStore.fetchConsumeOffsetFromBroker(messageQueue) >= offset;
    });
  }
}

const bodies = seen => seen.map(one => one.body).sort();

const scenarios = {
  // Alone, with all that a message can carry, large enough to be compressed, to a shard, and late.
  async sends(topic, producer) {
    const rich = message(topic, 'rich', 'TagA', { keys: [ 'k1', 'k2' ] });
    rich.properties.city = '東京';
    const large = message(topic, 'large ' + '0123456789'.repeat(2000), 'TagB');
    const late = message(topic, 'late', 'TagC', { delayTimeLevel: 1 });
    const answers = [];
    for (const sent of [ message(topic, 'plain', 'TagA'), rich, large, late ]) answers.push(await producer.send(sent));
    const sharded = [];
    for (const number of [ 0, 1, 2 ]) {
      sharded.push(await producer.send(message(topic, `sharded ${number}`, 'TagD', { shardingKey: 'apples' })));
    }
    const seen = await consume(topic, topic, '*');
    await waitFor('seven messages', () => new Set(bodies(seen)).size >= 7);
    const ids = new Set(seen.map(one => one.id));
    const told = {};
    for (const one of seen) {
      told[one.body.split(' 0123')[0]] = [ one.body.length, one.tags, one.keys, one.city, one.retries, one.properties ];
    }
    return {
      statuses: [ ...answers, ...sharded ].map(one => one.sendStatus),
      'ids agree': answers.slice(0, 3).every(one => ids.has(one.msgId)),
      'queues of a shard': new Set(sharded.map(one => one.messageQueue.queueId)).size,
      'waited long enough': seen.find(one => one.body === 'late').waited >= 950,
      received: told,
    };
  },

  // A part of what there is, by tags and by SQL.
  async filters(topic, producer) {
    for (const [ number, tag ] of [ 'TagA', 'TagB', 'TagC', 'TagA' ].entries()) {
      const sent = message(topic, `${number}${tag}`, tag);
      sent.properties.n = `${number}`;
      await producer.send(sent);
    }
    const all = await consume(topic, topic, '*');
    const tags = await consume(topic, `${topic}-tags`, 'TagA || TagC');
    const sql = await consume(topic, `${topic}-sql`, { expressionType: 'SQL92', subString: "n > 1 AND TAGS = 'TagA'" });
    await waitFor('eight messages', () => all.length >= 4 && tags.length >= 3 && sql.length >= 1);
    return { all: bodies(all), tags: bodies(tags), sql: bodies(sql) };
  },

  // A message comes again after its listener failed.
  async retried(topic, producer) {
    await producer.send(message(topic, 'again', 'TagA', { keys: [ 'k7' ] }));
    const seen = await consume(topic, topic, '*', {}, async got => {
      return got.reconsumeTimes ? undefined : Consumer.ACTION_RETRY;
    });
    await waitFor('two tries', () => seen.length >= 2);
    return seen.map(one => [ one.body, one.retries, one.properties ]);
  },

  // Both members of a group get everything.
  async broadcast(topic, producer) {
    const members = [];
    for (const instanceName of [ 'one', 'other' ]) {
      members.push(await consume(topic, topic, '*', { isBroadcast: true, instanceName: topic + instanceName }));
    }
    for (let number = 0; number < 6; number++) await producer.send(message(topic, `m${number}`, 'TagA'));
    for (const seen of members) await waitFor('six messages', () => seen.length >= 6);
    return members.map(bodies);
  },

  // A later run: the group of `filters` goes on where it was.
  async again(_, producer) {
    const topic = `${prefix}-filters`;
    for (const number of [ 0, 1 ]) await producer.send(message(topic, `again ${number}`, 'TagA'));
    const seen = await consume(topic, topic, '*');
    const fresh = () => bodies(seen).filter(body => body.startsWith('again'));
    await waitFor('two new messages', () => fresh().length >= 2);
    return { fresh: fresh(), 'goes on': seen.length < 2 + 4 }; // the last of each queue may come twice: at least once
  },

  // The topic PREFIX is consumed until the standard input ends; bodies are lines of the output.
  async stay() {
    const seen = await consume(prefix, prefix, '*', {}, async got => console.log(got.body.toString()));
    await waitFor('a message', () => seen.length);
    await new Promise(resolve => process.stdin.resume().once('end', resolve));
    return { bodies: bodies(seen) };
  },
};

async function main() {
  const producer = new Producer({ ...common, producerGroup: `${prefix}-producer` });
  producer.on('error', error => problems.push(error.message));
  await producer.ready();
  const told = {};
  await Promise.all(wanted.map(async name => {
    try {
      told[name] = await scenarios[name](`${prefix}-${name}`, producer);
    } catch (error) {
      told[name] = { error: error.message };
    }
  }));
  await Promise.all(consumers.map(persist));
  console.log(JSON.stringify(told));
  process.exit(0); // nobody waits for polls that brokers hold
}

main();
